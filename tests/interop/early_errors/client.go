// Sends requests by net/http of Go, on a connection each: client URL CA SIZE ROUNDS
package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

func send(url string, roots *x509.CertPool, body []byte) (int, string) {
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots},
		ForceAttemptHTTP2: true,
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
	response, err := client.Post(url, "application/octet-stream", bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	if response.ProtoMajor != 2 {
		return 0, "this was not HTTP/2 but " + response.Proto
	}
	return response.StatusCode, string(text)
}

func main() {
	url := os.Args[1]
	pem, err := os.ReadFile(os.Args[2])
	if err != nil {
		panic(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	size, _ := strconv.Atoi(os.Args[3])
	rounds, _ := strconv.Atoi(os.Args[4])
	body := make([]byte, size)
	for range rounds {
		status, text := send(url, roots, body)
		line, _ := json.Marshal([]any{status, text})
		fmt.Println(string(line))
	}
}
